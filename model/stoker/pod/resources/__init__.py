"""What pods take and nodes offer, read from Kubernetes' objects: amounts, devices, claims. Pure.

Owns: quantities, the requests of a pod, the devices of ResourceSlices, the allocations of ResourceClaims, taints.
Placement, the gateway and the command line count with these functions, so that they agree. Imports nothing of ours.

Read `quantity`, then `pod_requests`, then `device` and `device_allocation`; `gpu` says what is a GPU.
"""
