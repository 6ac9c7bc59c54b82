"""Who acts."""
