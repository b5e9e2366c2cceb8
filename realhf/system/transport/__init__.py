"""Messages between master and workers: channel, authentication, heartbeats, reply receiver."""
