"""The tests show that logits are a function of the text: their bits do not depend on how the text was reached."""
