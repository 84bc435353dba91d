"""The loop, the scheduler, stopping rules and the ledger."""
