"""Rendering: from resources and settings to the objects that Kubernetes keeps. Pure functions, same input, same object.

Owns: names, labels, pod templates, configuration files, Services, policies and budgets of our children.
May import: `api`, `domain`. It never imports a cluster or a reconciler, and reads no clock.

Read in this order: `names`, `pod` (one pod from curated fields), `storage`, `keys`, then `trainer`, `task`, `engine`,
`router`, `network_policy`.
"""
