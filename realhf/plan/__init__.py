"""Planning: pure functions on the data types of api/ and arch/. No torch, no IO, no clock."""
