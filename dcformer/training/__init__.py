"""Training on the Hugging Face Trainer: text to packed blocks (`prepare_data`), blocks to a trained model (`train`)."""

from dcformer.training.data import DataSettings, PreparedData, prepare_data
from dcformer.training.tokenizer import with_vocabulary
from dcformer.training.trainer import TrainResult, TrainSettings, train

__all__ = ["DataSettings", "PreparedData", "TrainResult", "TrainSettings", "prepare_data", "train", "with_vocabulary"]
