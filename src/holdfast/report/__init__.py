"""A run as one page: what its folder says, drawn without anything from elsewhere."""
