"""What families share: fields of a configuration, rotary parameters, routed experts."""
