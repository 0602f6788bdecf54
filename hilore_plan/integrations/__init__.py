"""Where other people's packages come in: models, the TRL trainer, and the launcher of training commands.

Takes names of models, trainers and commands; gives loaded models, attached plans and exit codes. The only room that
may import transformers, peft, gguf and trl, each inside the function that needs it, so that nothing else requires them.
"""
