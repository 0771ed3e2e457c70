"""Network parts: backbones, growing heads, adapters, prompts and network surgery."""
