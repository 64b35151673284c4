"""How to run a checkpoint: the section of its card with a command for each program that reads its format.

Flags are those of vLLM 0.31, transformers 5.17, SGLang's documentation (`docs/advanced_features/quantization.md`),
llama.cpp b10359 and Ollama 0.33. SGLang and Ollama were not run.
"""

from kit.core.formats import FORMATS

# Readers of each format. vLLM and SGLang choose the quantization from config.json; SGLang's page says not to pass
# --quantization for a checkpoint that is stored quantized.
TRANSFORMERS = ("bf16", "fp8", "fp8_block", "fp8_static", "w4a16", "awq", "nf4")
SGLANG = ("bf16", "fp8", "fp8_static", "w4a16", "awq")
VLLM_NEEDS = {
    "nf4": "pip install vllm-bnb-plugin   # vLLM from 0.28 on reads bitsandbytes by this plugin",
    "nvfp4": "# Blackwell (compute capability 10.0 or newer) multiplies FP4; older GPUs round no activations",
}


def usage(manifest: dict) -> str:
    """The section; `PATH` stands for the directory or its repository on the hub."""
    name = manifest["format"]
    if manifest.get("kind") == "gguf":
        file = next(file for file in manifest["files"] if file.endswith(".gguf"))
        return gguf_usage(file)
    if name not in FORMATS:
        return ""
    parts = ["## How to run it", "`PATH` is this directory, or its repository on the hub."]
    parts += [block("vLLM", f"{VLLM_NEEDS[name]}\n" if name in VLLM_NEEDS else "", "vllm serve PATH")]
    if name in TRANSFORMERS:
        parts.append(transformers(name))
    if name in SGLANG:
        parts.append(block("SGLang", "", "python3 -m sglang.launch_server --model-path PATH --port 30000"))
    if name == "bf16":
        parts.append(to_gguf())
    else:
        parts.append("llama.cpp and Ollama do not read this format: convert the run's BF16 checkpoint to GGUF.")
    return "\n\n".join(parts)


def block(title: str, before: str, command: str) -> str:
    return f"{title}:\n\n```sh\n{before}{command}\n```"


def transformers(name: str) -> str:
    reader = {"": "", "bitsandbytes": "bitsandbytes "}.get(FORMATS[name].layout, "compressed-tensors ")
    return f"""transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer  # pip install {reader}accelerate

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto", device_map="auto")
messages = [{{"role": "user", "content": "…"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs.to(model.device), max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
```"""


def to_gguf() -> str:
    """Commands of llama.cpp's own tools, for a machine that has the checkpoint and not the run."""
    return """llama.cpp, after conversion by the tools in its repository (`PATH` must be a directory):

```sh
python convert_hf_to_gguf.py PATH --outtype bf16 --outfile model-bf16.gguf
llama-quantize model-bf16.gguf model-Q4_K_M.gguf Q4_K_M
llama-server --model model-Q4_K_M.gguf --jinja --port 8080
```

Ollama, from the converted file:

```sh
echo "FROM ./model-bf16.gguf" > Modelfile
ollama create my-model --quantize q4_K_M -f Modelfile
ollama run my-model
```

`python -m merge gguf` writes both files, compared with this checkpoint."""


def gguf_usage(file: str) -> str:
    name = file.removesuffix(".gguf")
    return f"""## How to run it

llama.cpp:

```sh
llama-server --model {file} --jinja --port 8080
llama-cli --model {file} --jinja
```

Ollama, with the `Modelfile` beside the file (0.30.11 or newer, which renders prompts by the template in the file):

```sh
ollama create {name} -f Modelfile
ollama run {name}
```

transformers dequantizes it (`AutoModelForCausalLM.from_pretrained(PATH, gguf_file="{file}")`), and its tokenizer is
that of the BF16 checkpoint. vLLM and SGLang: serve the BF16 checkpoint of the same run or one of its formats."""
