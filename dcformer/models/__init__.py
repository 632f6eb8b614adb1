"""Models for Hugging Face transformers, one package each: `dcformer` (Transformer++ with composable heads)."""
