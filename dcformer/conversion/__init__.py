"""Composable heads for pretrained transformers: `convert` and `unconvert`."""
