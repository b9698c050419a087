"""Quality against cost: tasks, metrics, layouts to compare, FLOPs, and the report."""
