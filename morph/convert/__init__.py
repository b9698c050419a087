"""From a pretrained attention model to a Morph folder with mixers to train."""
