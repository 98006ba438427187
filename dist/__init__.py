"""Data parallel training by hand: process group, gradient buckets, DDP, sharded optimizer."""
