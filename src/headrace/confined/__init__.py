"""Work whose cost somebody else chooses, in processes that may use so much and reach nothing."""
