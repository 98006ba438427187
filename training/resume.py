"""What may go on from what: a run from a checkpoint, and a new run from another one's weights."""

# Options that the shapes of weights need not show, and that change what the weights mean.
READING = ("num_heads", "num_kv_heads", "qk_norm", "tie_weights", "rope_theta", "norm_eps")
# Options that fix which text a step trains on.
DATA_ORDER = ("seed", "batch_size", "max_seq_len", "epochs")
# What --allow_changed can name.
ALLOWABLE = (*DATA_ORDER, *READING, "tokenizer", "data")
