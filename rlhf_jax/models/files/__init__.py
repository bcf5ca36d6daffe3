"""Read and write the weights of models: Hugging Face folders and GGUF files."""
