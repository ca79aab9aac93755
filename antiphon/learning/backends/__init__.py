"""Learners on other training libraries: DeepSpeed and Megatron-Core."""
