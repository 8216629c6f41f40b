"""The engine's options as the command line shows them: type, name, help and the group it stands in."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, MEMORY, SCHEDULING, ADVANCED = "Model and device", "Memory", "Scheduling", "Advanced"
ADAPTERS = "Adapters"

Model = Annotated[
    str,
    typer.Argument(
        help="A directory with config.json and weights, a .gguf file, a Hugging Face id (when the network allows), "
        "or an alias. The default is SmolLM2-135M-Instruct, an Apache-2.0 model that comes from the Python package "
        "index."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to run: auto, a device of an installed plugin such as cpu, one of several such as cuda:1, or "
        "its full name such as enginecore-cpu:cpu. auto takes the one healthy accelerator, or the CPU where no "
        "accelerator plugin is installed. 'enginecore devices' lists them.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Arithmetic of weights and activations: auto, bfloat16, float16 or float32. auto asks the plugin, "
        "then the checkpoint.",
        rich_help_panel=MODEL,
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="auto computes with weights in --dtype; gguf keeps the blocks of a GGUF file as they are; int8 turns the "
        "weights of any checkpoint into bytes. Both round activations to bytes.",
        rich_help_panel=MODEL,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        metavar="auto|int8|fp8_e4m3|fp8_e5m2|...",
        help="What keys and values are kept in: auto (--dtype), bfloat16, float16, float32, int8 (a scale for each "
        "token and head), fp8_e4m3 (also fp8) or fp8_e5m2. Bytes hold about twice the tokens of bfloat16 in the same "
        "memory. What the device lacks is refused.",
        rich_help_panel=MEMORY,
    ),
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto",
        help="Longest sequence in tokens, prompt and answer together. Default: what the model was made for. auto "
        "takes the longest that the KV cache can hold.",
        rich_help_panel=MODEL,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Jinja chat template to use instead of the model's own.", rich_help_panel=MODEL),
]
Runner = Annotated[
    str,
    typer.Option(
        metavar="auto|generate|pooling",
        help="What the model is for: to generate text, or pooling (vectors, scores, classes). auto goes by its files: "
        "modules.json or a head for classification means pooling.",
        rich_help_panel=MODEL,
    ),
]
PoolerConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="What goes before the model's own settings of pooling: pooling_type (mean, cls, lasttoken, max, "
        "mean_sqrt_len_tokens), normalize, activation (softmax, sigmoid, none), matryoshka (true, false or a list of "
        "lengths to which a vector may be cut).",
        rich_help_panel=MODEL,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        metavar="auto|none|DIR",
        help="Where sampling defaults come from: the model's own generation_config.json (auto), nowhere (none), or "
        "the one in DIR. What a request says always wins.",
        rich_help_panel=MODEL,
    ),
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache alone, such as 2GiB or 512MB. Default: what --memory-utilization leaves "
        "after the weights.",
        rich_help_panel=MEMORY,
    ),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Blocks of the KV cache; the other way of saying --kv-cache-memory.",
        rich_help_panel=MEMORY,
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block: 8, 16, 32, 64 or 128.", rich_help_panel=MEMORY)]
MemoryUtilization = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the device's memory that this process may use, weights and cache together, such as 0.5. "
        "Default: the plugin's choice, else 0.9.",
        rich_help_panel=MEMORY,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        help="Keep the KV blocks of finished requests and reuse them for prompts that begin the same way.",
        rich_help_panel=MEMORY,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Sequences that run at the same time. Default: the plugin's choice, else 256.",
        rich_help_panel=SCHEDULING,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens computed in one step, over all sequences. Smaller gives smoother streams, larger more "
        "throughput. Default: the plugin's choice, else 2048.",
        rich_help_panel=SCHEDULING,
    ),
]
LongPrefillTokenThreshold = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Most tokens of one prompt in one step, so that a long prompt cannot take a whole step. 0: no such limit.",
        rich_help_panel=SCHEDULING,
    ),
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        metavar="fcfs|priority|fair",
        help="Who waits: first come, first served; by the priority in the request (smaller goes first); or whose "
        "tenant has had the least done. A tenant is the name of an API key where there are several, else the "
        "cache_salt.",
        rich_help_panel=SCHEDULING,
    ),
]
TenantWeight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TENANT=WEIGHT",
        help="Under the policy fair: a tenant's share relative to others, who have 1; may be repeated.",
        rich_help_panel=SCHEDULING,
    ),
]
TenantCacheFloor = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the KV blocks that each tenant's cached prefixes keep while others press, such as 0.05.",
        rich_help_panel=MEMORY,
    ),
]
TenantCacheCap = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the KV blocks that one tenant's cached prefixes may take at most, such as 0.5.",
        rich_help_panel=MEMORY,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.", rich_help_panel=SCHEDULING)]
MaxLogprobs = Annotated[
    int,
    typer.Option(help="Most log-probabilities a request may ask for at a position.", rich_help_panel=SCHEDULING),
]
NumThreads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Host threads. Default: the plugin's choice.", rich_help_panel=ADVANCED),
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the plugin itself, such as step_time_s=0.01 of the simulated device; may be repeated. "
        "The value is read as JSON where it is JSON, else as text.",
        rich_help_panel=ADVANCED,
    ),
]
Fuse = Annotated[
    bool, typer.Option(help="Join matrix products and norms where that is exact.", rich_help_panel=ADVANCED)
]
StrictOps = Annotated[
    bool,
    typer.Option(
        "--strict-ops",
        help="Fail when the device has no kernel of its own for an operation, instead of running the reference there.",
        rich_help_panel=ADVANCED,
    ),
]
Speculation = Annotated[
    str,
    typer.Option(
        metavar="auto|off|ngram",
        help="Guess the next tokens and compute several in one step; those that the model would have chosen are kept. "
        "ngram guesses what came after the same words before, where that pays: where answers repeat themselves or "
        "quote their prompt, as summaries, edits of code and extraction do. auto does so where the device computes a "
        "token alike alone and beside others, so that answers stay the same to the last bit.",
        rich_help_panel=ADVANCED,
    ),
]
NumSpeculativeTokens = Annotated[
    int, typer.Option(metavar="N", help="Most tokens that are guessed at once.", rich_help_panel=ADVANCED)
]
EnforceEager = Annotated[
    bool,
    typer.Option(
        "--enforce-eager",
        help="Capture no graphs: every step gives its operations to the device one by one.",
        rich_help_panel=ADVANCED,
    ),
]
RequireGraphs = Annotated[
    bool,
    typer.Option(
        "--require-graphs",
        help="Fail when the device cannot capture its decode steps as graphs, instead of running them eagerly.",
        rich_help_panel=ADVANCED,
    ),
]
Overlap = Annotated[
    str,
    typer.Option(
        "--overlap",
        help="Plan the next step while the device is at one: auto does where the device works asynchronously, on runs "
        "steps in a thread of their own elsewhere, off waits for each. Results are the same.",
        rich_help_panel=ADVANCED,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model's files.", rich_help_panel=ADVANCED
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read .bin weights, through the weights-only loader. safetensors and GGUF need no such permission.",
        rich_help_panel=ADVANCED,
    ),
]
KvHostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory for copies of KV blocks, such as 8GiB: prompts that begin with what the device's cache has "
        "lost get it back from there instead of computing it. On a CPU this comes on top of --kv-cache-memory.",
        rich_help_panel=MEMORY,
    ),
]
KvDisk = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder for copies of KV blocks, which outlive the process. Several servers may share one. It holds what "
        "prompts say, in another form: keep it as safe as the prompts.",
        rich_help_panel=MEMORY,
    ),
]
KvDiskSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most that --kv-disk may hold; what was used least recently is deleted. Default: 10GiB.",
        rich_help_panel=MEMORY,
    ),
]
KvEventsEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Publish changes of the prefix cache over ZeroMQ, for prefix-aware routers: tcp://*:5557 waits for them "
        "there, and an address without a wildcard is that of a router to connect to.",
        rich_help_panel=ADVANCED,
    ),
]
KvEventsReplay = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Where subscribers can ask for the changes that they missed.",
        rich_help_panel=ADVANCED,
    ),
]
KvEventsTopic = Annotated[
    str | None,
    typer.Option(
        metavar="TOPIC",
        help="Topic of published changes. Default: kv@HOST@MODEL.",
        rich_help_panel=ADVANCED,
    ),
]
EnableLora = Annotated[
    bool,
    typer.Option("--enable-lora", help="Serve low-rank adapters (LoRA) beside the model.", rich_help_panel=ADAPTERS),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=DIR",
        help="An adapter to load at the start, as the PEFT library saves it, and the name that requests give as their "
        "model; may be repeated.",
        rich_help_panel=ADAPTERS,
    ),
]
MaxLoras = Annotated[int, typer.Option(metavar="N", help="Adapters that one batch may mix.", rich_help_panel=ADAPTERS)]
MaxLoraRank = Annotated[
    int,
    typer.Option(metavar="N", help="Largest rank of an adapter: 8, 16, 32, 64, 128 or 256.", rich_help_panel=ADAPTERS),
]
MaxCpuLoras = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Adapters that may be loaded, those in host memory included. Default: twice --max-loras.",
        rich_help_panel=ADAPTERS,
    ),
]
LoraRoot = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The folder that adapters may be loaded from at run time, with an operator's key; without it none are.",
        rich_help_panel=ADAPTERS,
    ),
]
