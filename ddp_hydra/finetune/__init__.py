"""Models, adapters and text of Hugging Face's libraries: `pip install 'ddp-hydra[finetune]'`."""
