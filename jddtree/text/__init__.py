"""Text in and out of the model: token ids, streamed text, chat prompts, tool declarations and stop ids."""
