"""Pictures of what a selector did; needs the extra ``figures``."""
