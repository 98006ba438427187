"""What a user can get wrong about texts, tokenizers and token files, each answered in one line."""


class CorpusError(ValueError):
    """A user's mistake about texts, tokenizer or token files.

    Its message is one line that says what is wrong, with the values, and what to do.
    """


class FolderExistsError(CorpusError):
    """The folder of token files is there already, perhaps since a moment ago.

    Who only wants the folder to exist, as the training job does, may catch it and read on.
    """
