"""Floor 2: pure functions on the words of api/. No torch, no IO, no clock: everything that is decided, is decided here."""
