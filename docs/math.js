document.addEventListener('DOMContentLoaded', () => {
  document.querySelectorAll('.arithmatex').forEach((node) => renderMathInElement(node, {
    delimiters: [{ left: '\\(', right: '\\)', display: false }, { left: '\\[', right: '\\]', display: true }],
  }));
});
