"""Parts shared by several APIs: body fields, chat prompts, tools, structured outputs, message building."""
