"""Tables on a mesh of devices."""
