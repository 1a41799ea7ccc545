// Element by element: what some families of targets do beside the common steps.

template <int N>
__device__ void scale(bf16* x, i64 stride, i64 rows, i64 cols, float by) {
    FOR_EACH(N) {
        float v[N];
        load(x + row * stride + col, v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= by;
        store(x + row * stride + col, v);
    }
}

// y += x
template <int N>
__device__ void add(const bf16* x, i64 x_stride, bf16* y, i64 y_stride, i64 rows, i64 cols) {
    FOR_EACH(N) {
        float v[N], w[N];
        load(x + row * x_stride + col, v);
        load(y + row * y_stride + col, w);
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] += v[i];
        store(y + row * y_stride + col, w);
    }
}

// dst[ids[i]] += weights[i] * src[i]; no id comes twice.
template <int N>
__device__ void scatter_add(const bf16* src, i64 src_stride, const u32* ids, const float* weights, bf16* dst,
                            i64 dst_stride, i64 dst_rows, i64 rows, i64 cols) {
    FOR_EACH(N) {
        i64 to = ids[row];
        if (to >= dst_rows) continue;
        float v[N], w[N], weight = weights[row];
        load(src + row * src_stride + col, v);
        load(dst + to * dst_stride + col, w);
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] += weight * v[i];
        store(dst + to * dst_stride + col, w);
    }
}

// 0.5 x (1 + tanh u) = x sigmoid(2 u)
__device__ __forceinline__ float gelu(float x) {
    float u = 0.7978846f * (x + 0.044715f * x * x * x);
    return x / (1.f + __expf(-2.f * u));
}

// `cols` is that of y: half of gate_up's.
template <int N>
__device__ void geglu(const bf16* gate_up, i64 in_stride, bf16* y, i64 out_stride, i64 rows, i64 cols) {
    FOR_EACH(N) {
        float gate[N], up[N];
        const bf16* in = gate_up + row * in_stride + col;
        load(in, gate);
        load(in + cols, up);
#pragma unroll
        for (int i = 0; i < N; ++i) gate[i] = gelu(gate[i]) * up[i];
        store(y + row * out_stride + col, gate);
    }
}

BOTH(scale, (bf16* x, i64 stride, i64 rows, i64 cols, float by), (x, stride, rows, cols, by))
BOTH(add, (const bf16* x, i64 x_stride, bf16* y, i64 y_stride, i64 rows, i64 cols),
     (x, x_stride, y, y_stride, rows, cols))
BOTH(scatter_add,
     (const bf16* src, i64 src_stride, const u32* ids, const float* weights, bf16* dst, i64 dst_stride, i64 dst_rows,
      i64 rows, i64 cols),
     (src, src_stride, ids, weights, dst, dst_stride, dst_rows, rows, cols))
BOTH(geglu, (const bf16* gate_up, i64 in_stride, bf16* y, i64 out_stride, i64 rows, i64 cols),
     (gate_up, in_stride, y, out_stride, rows, cols))
