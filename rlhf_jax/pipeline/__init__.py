"""Schedule pipelines that train several models at once on the same nodes (RLHFuse)."""
