"""Questions over data sets: streams in, shards out, each row answered exactly once."""
