//! Memory shared by the processes: segment, ring of slots, ledger, step word, finish, seats, wake-ups, recovery.
