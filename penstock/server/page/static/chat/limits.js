// Limits of what the page keeps and reads.

export const VERSION = 1; // of a conversation's form
export const MAX_CONVERSATIONS = 500;
export const MAX_CONVERSATION_CHARS = 8 << 20;
export const MAX_IMPORT_BYTES = 64 << 20;
export const MAX_NODES = 10_000; // of a conversation
export const MAX_TEXT_CHARS = 4 << 20; // of a message
export const MAX_MESSAGE_CHARS = 1 << 20; // that is sent; a browser takes long to lay out more
export const MAX_SHOWN_CHARS = 20_000; // of a sent message, until all of it is asked for
export const MAX_TITLE_CHARS = 200;
export const MAX_KEPT_TOKENS = 4000; // whose log probabilities are kept with an answer
