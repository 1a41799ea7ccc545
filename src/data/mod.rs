//! Conversations to token ids and loss masks, and from there to work units in a known order.
