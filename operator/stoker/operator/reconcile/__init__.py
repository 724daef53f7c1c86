"""One package per kind: a pure function from what is observed to a `Plan`.

Every kind has the same parts: `view` (the observation, sorted once), `reconcile` (decides, and returns a typed
outcome), `outcome` (the fields of the status that a decision may change), `status` (`derive_status`, the only
function that puts the status together). `outcome` and `intent` beside the kinds are shared: what every status has in
common, and which spec is in force while an edit is refused.

May import `api`, `domain` and `render`; never `loop`, and never a cluster. Time is an argument. Kinds know each other
only downwards: a deployment its pools.
"""
