"""Registration of our config with `transformers`: after `import glassformer`,
`AutoModelForCausalLM.from_pretrained(folder)` loads a folder in this package's format.

`transformers` keeps a table of the configs it knows. Ours is added at once if the table is loaded already, otherwise
when it is loaded; until then nothing is imported. The class of models is imported when a config of ours is read.
"""

from glassformer.register.finder import hook as hook
