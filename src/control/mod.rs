//! Small messages between the launcher and its workers, over ipc-channel.
