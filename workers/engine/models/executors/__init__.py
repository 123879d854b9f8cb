"""What runs a forward pass of the target."""
