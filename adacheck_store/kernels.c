/* Three loops in AVX-512, built where there is a compiler and used where they prove themselves.

   adamw      torch's fused AdamW over bfloat16 gradients, to the bit, in one pass over memory
   block_sum  the fingerprint of a block or a piece of one, see fingerprint.py
   round_half float32 rounded to bfloat16, in place and to a copy, in one pass over memory

   `kernels.py` holds them to torch and numpy before it lets anybody call them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stdint.h>

#define WIDE __attribute__((target("avx512f")))
#define ALL(value) _mm512_set1_ps(value)

typedef struct {
    float decay, weight, beta2, rest, root, eps, rate;
} Scalars;

static int wide(void) { return __builtin_cpu_supports("avx512f"); }

/* The order of operations is that of ATen's FusedAdamKernel as it is compiled. */
WIDE static void fold(float *param, float *first, float *second, const uint16_t *grad,
                      Py_ssize_t count, const Scalars *s) {
    for (Py_ssize_t i = 0; i < count; i += 16) {
        __m256i half = _mm256_loadu_si256((const __m256i *)(grad + i));
        __m512 g = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        __m512 m = _mm512_loadu_ps(first + i), v = _mm512_loadu_ps(second + i);
        __m512 p = _mm512_mul_ps(_mm512_loadu_ps(param + i), ALL(s->decay));
        m = _mm512_fmadd_ps(ALL(s->weight), _mm512_sub_ps(g, m), m);
        v = _mm512_fmadd_ps(_mm512_mul_ps(ALL(s->rest), g), g, _mm512_mul_ps(v, ALL(s->beta2)));
        __m512 size = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), ALL(s->root)), ALL(s->eps));
        p = _mm512_add_ps(p, _mm512_div_ps(_mm512_mul_ps(ALL(s->rate), m), size));
        _mm512_storeu_ps(param + i, p);
        _mm512_storeu_ps(first + i, m);
        _mm512_storeu_ps(second + i, v);
    }
}

/* sum(w[i] * (2(i + first) + 1)) mod 2^64 over signed 32-bit words, eight at a time. */
WIDE static uint64_t weigh(const uint8_t *data, Py_ssize_t words, Py_ssize_t first) {
    __m512i sum = _mm512_setzero_si512(), step = _mm512_set1_epi64(16);
    __m512i weight = _mm512_add_epi64(_mm512_set1_epi64(2 * first),
                                      _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1));
    Py_ssize_t i = 0;
    for (; i + 8 <= words; i += 8) {
        __m256i some = _mm256_loadu_si256((const __m256i *)(data + 4 * i));
        sum = _mm512_add_epi64(sum, _mm512_mul_epi32(_mm512_cvtepi32_epi64(some), weight));
        weight = _mm512_add_epi64(weight, step);
    }
    uint64_t total = (uint64_t)_mm512_reduce_add_epi64(sum);
    for (; i < words; i++) {
        int32_t word;
        memcpy(&word, data + 4 * i, 4);
        total += (uint64_t)((int64_t)word * (2 * (int64_t)(i + first) + 1));
    }
    return total;
}

/* To the nearest, of two to the even one, as torch does; every NaN becomes one. */
WIDE static __m512i rounded(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), even));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(bits, 16), nan, _mm512_set1_epi32(0x7fc0));
}

WIDE static void round_all(float *values, uint16_t *halves, Py_ssize_t count) {
    Py_ssize_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i bits = rounded(_mm512_loadu_ps(values + i));
        _mm512_storeu_ps(values + i, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        _mm256_storeu_si256((__m256i *)(halves + i), _mm512_cvtepi32_epi16(bits));
    }
    if (i < count) { /* masked stores are slow: at the end alone */
        __mmask16 some = (__mmask16)((1u << (count - i)) - 1);
        __m512i bits = rounded(_mm512_maskz_loadu_ps(some, values + i));
        _mm512_mask_storeu_ps(values + i, some, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        _mm512_mask_cvtepi32_storeu_epi16(halves + i, some, bits);
    }
}

static PyObject *adamw(PyObject *module, PyObject *args) {
    unsigned long long param, first, second, grad;
    Py_ssize_t count;
    Scalars s;
    if (!PyArg_ParseTuple(args, "KKKKnfffffff", &param, &first, &second, &grad, &count, &s.decay,
                          &s.weight, &s.beta2, &s.rest, &s.root, &s.eps, &s.rate))
        return NULL;
    if (count < 0 || count % 16 != 0 || !wide()) {
        PyErr_SetString(PyExc_ValueError, "not a multiple of 16 elements, or no AVX-512");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    fold((float *)(uintptr_t)param, (float *)(uintptr_t)first, (float *)(uintptr_t)second,
         (const uint16_t *)(uintptr_t)grad, count, &s);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *block_sum(PyObject *module, PyObject *args) {
    Py_buffer view;
    Py_ssize_t first = 0;
    if (!PyArg_ParseTuple(args, "y*|n", &view, &first)) return NULL;
    if (view.len % 4 != 0 || view.len > (Py_ssize_t)1 << 31 || first < 0 || first >> 29 ||
        !wide()) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "no whole words, too many, or no AVX-512");
        return NULL;
    }
    uint64_t total;
    Py_BEGIN_ALLOW_THREADS;
    total = weigh(view.buf, view.len / 4, first);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(total);
}

static PyObject *round_half(PyObject *module, PyObject *args) {
    unsigned long long values, halves;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KKn", &values, &halves, &count)) return NULL;
    if (count < 0 || !wide()) {
        PyErr_SetString(PyExc_ValueError, "a negative count, or no AVX-512");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    round_all((float *)(uintptr_t)values, (uint16_t *)(uintptr_t)halves, count);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"adamw", adamw, METH_VARARGS, "One update, in place; addresses, elements, scalars."},
    {"block_sum", block_sum, METH_VARARGS, "The fingerprint of 32-bit words; the first one's place."},
    {"round_half", round_half, METH_VARARGS, "Round in place and to a copy; addresses, elements."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__kernels(void) {
    if (!wide()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no AVX-512");
        return NULL;
    }
    return PyModule_Create(&module);
}
