"""What vLLM and SGLang load, and what llama.cpp converts, read from their source packages."""
