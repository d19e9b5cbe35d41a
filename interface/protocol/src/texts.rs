//! Texts that come from elsewhere: programs' names and reasons, what an agent that is not ours sends. They end up in
//! terminals and logs.

pub use baton_linux::terminal::plain;
