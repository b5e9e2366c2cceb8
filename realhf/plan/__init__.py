"""Floor 2: pure functions on the words of api/. No torch, no IO, no clock: what is decided, is decided here."""
