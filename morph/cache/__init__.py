"""The hybrid-aware context cache: what is kept, where, and for how long. It never computes and never reads a tensor."""
