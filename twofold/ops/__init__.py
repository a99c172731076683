"""Pure functions on tensors. The reference here is the specification of every faster version."""
