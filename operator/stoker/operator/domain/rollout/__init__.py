"""The canary of a deployment: what was measured of two revisions, the gates, and the decision about the shares. Pure.

Read in this order: `evidence` (what the routers counted), `gates` (a verdict for each gate), `headroom` (what the old
revision can take), `canary` (the step that follows). The InferenceDeployment's reconcile calls `decide` in each pass
and keeps its state in the status.
"""
