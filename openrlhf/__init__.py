"""OpenRLHF: RLHF on Ray, vLLM, DeepSpeed and Transformers, from one laptop to a cluster."""

__version__ = "0.1.0"
