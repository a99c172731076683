from twofold.models.tokenizer import Tokenizer as Tokenizer
