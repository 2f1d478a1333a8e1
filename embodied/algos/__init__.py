"""Learning: losses and returns as pure functions, and the learners made of them."""
