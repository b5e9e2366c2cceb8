"""Level 3, planning: pure functions on the data types of api/ and arch/. No torch, no IO, no clock."""
