"""The queue of gangs that wait for nodes: order, back-fill and what starts now. Pure, on plain values."""
