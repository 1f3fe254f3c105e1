"""Files that are not read, and what to do with each."""

import re

LFS_POINTER = "a pointer of git-lfs: fetch it with `git lfs pull`"
ADAPTER = "an adapter: merge it, by peft's model.merge_and_unload().save_pretrained(folder)"
# What to do with other files. The keys are patterns that match the names of the files. If a folder
# has several such files, the advice of the first pattern is given. The index file comes first,
# because it names all shards, also the shards of a variant such as fp16. In the advice for pickles,
# each tensor is cloned, because tied tensors share memory, which save_file refuses.
ADVICE_BY_PATTERN = {
    r"\.safetensors\.index\.": "pass it",
    r"(^|/)adapter_": ADAPTER,
    r"-of-\d+\.safetensors$": "a shard: put the index file of all shards beside it",
    r"\.safetensors$": "pass it",
    r"\.bin$": (
        "a pickle may run code and is not opened: convert it with "
        "safetensors.torch.save_file({k: v.clone().contiguous() "
        "for f in glob.glob('pytorch_model*.bin') "
        "for k, v in torch.load(f, weights_only=True).items()}, 'model.safetensors')"
    ),
    r"\.gguf$": (
        "a GGUF file: convert it with transformers.AutoModelForCausalLM.from_pretrained(folder, "
        "gguf_file=name).save_pretrained(new_folder), which dequantizes it, and load new_folder"
    ),
    r"\.onnx$": (
        "an ONNX file: convert it with safetensors.numpy.save_file({t.name: "
        "onnx.numpy_helper.to_array(t) for t in onnx.load(name).graph.initializer}, "
        "'model.safetensors')"
    ),
    r"\.distcp$": (
        "a checkpoint of torch.distributed: convert it with torch.distributed.checkpoint."
        "format_utils.dcp_to_torch_save(folder, 'pytorch_model.bin'), and load that file with "
        "torch.load(weights_only=True) to save it with safetensors.torch.save_file"
    ),
    # The second half of this pattern matches files of Orbax and T5X.
    r"\.(h5|msgpack|pth?|npz|ckpt(\.(index|meta|data-\S+))?)$|"
    r"(^|/)(_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|\.zarray)$": (
        "restore it with the library that reads it and save it as safetensors, or put its arrays "
        "where te.pretrained.load_config says"
    ),
    r"^config\.json$": "te.pretrained.load_config reads it without parameters",
}


def advice_for(*names: str) -> str:
    """Returns the first of these file names that is known, and what to do with that file.

    For example, "model.gguf" gives "model.gguf: a GGUF file: convert it with ...". If no name is
    known, the result is "".
    """
    for pattern, advice in ADVICE_BY_PATTERN.items():
        for name in names:
            if re.search(pattern, name):
                return f"{name}: {advice}"
    return ""
