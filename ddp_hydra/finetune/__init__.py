"""Fine-tuning of models of Hugging Face's transformers: `pip install 'ddp-hydra[finetune]'`."""
